"""Replies that several dialects give."""
