"""The case study's loop design, rebuilt as small as possible, with its defects one by one.

All code is our own: it shares with the case study only the design that its reports and its
measurements describe. With every defect off it is Native Sparse Attention, one token at a time.
"""
