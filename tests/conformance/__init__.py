"""Black-box tests of torchrun's contract: a command line in, what can be observed from outside out.

LAUNCHER=torchrun runs the same tests against torchrun, which is to pass them but for those marked `defect` or `beyond`.
"""
