"""How fast does the model train, and where does a step's time go?"""
