"""The trainer process: reads recorded sequences, decides when to train, and does a round of
training.
"""
