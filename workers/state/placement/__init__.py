"""Who holds which part of each tensor of a framework's own: on one mesh of members or on several, in chunks or in flat
ranges. Pure.
"""
