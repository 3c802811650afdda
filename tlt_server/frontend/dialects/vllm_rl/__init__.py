"""Shapes of the dialect `vllm_rl`: what trainers that drive vLLM send and expect."""
