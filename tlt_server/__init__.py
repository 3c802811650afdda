"""TLT Server: exact, adaptive speculative rollouts for reasoning-RL trainers."""

__version__ = "0.1.0"
