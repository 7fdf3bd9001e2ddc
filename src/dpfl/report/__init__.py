"""Show what happened: one page for a board and for an engineer, figures for papers, and the page of
a run that goes on.
"""
