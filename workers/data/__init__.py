"""Data: which samples a step uses (`order`), and how a batch is made of them (`batches`)."""
