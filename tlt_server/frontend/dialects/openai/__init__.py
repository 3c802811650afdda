"""What the OpenAI dialect is made of: bodies that clients send, log-probs in both shapes, replies.
`dialects.openai` has its routes.
"""
