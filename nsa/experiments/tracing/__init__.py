"""Which gradient arrives on which rank, in which order and bucket?"""
