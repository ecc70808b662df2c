"""Is what a training will hold foretold rightly, before it runs?"""
