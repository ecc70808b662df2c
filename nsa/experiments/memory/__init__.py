"""How much memory does a training step hold, and how does that grow with T?"""
