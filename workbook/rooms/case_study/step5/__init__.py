"""The step-5 hang: is it hung or slow?"""
