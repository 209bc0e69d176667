"""Frozen parameters and buffers of layers: state that no optimizer keeps, so a worker holds it with its layers.

`places` says who holds what and where it is in memory, `moving` brings it to those who lack it while all pause, and
`copies` keeps it in other workers' host memory where too few workers hold it.
"""
