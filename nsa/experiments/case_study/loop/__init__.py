"""The case study's loop design, built anew and as small as it can be, its defects one by one.

Our own code throughout: what it shares with the case study is the design that its reports and its
measurements describe. With every defect off it is Native Sparse Attention, one token at a time.
"""
