"""Speculation: drafters propose, the tree cuts to a budget, the target decides, the walk accepts
what equals. Lossless by construction.
"""
