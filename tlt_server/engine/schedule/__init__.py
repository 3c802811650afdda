"""Decides who runs in the next step, and applies what a step found. No tensors."""
