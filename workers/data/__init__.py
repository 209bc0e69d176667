"""Data: which samples a step uses (`order`), how a batch is made of them (`batches`), what a script hands over
(`source`), and who loads it: the training thread or processes (`loader`, `process`), which ask `ahead` what comes next.
"""
