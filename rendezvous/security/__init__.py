"""Who may take part in a job: its secret, the certificates made from it, and the files that hold them.

`secret` reads what the user gives, `authority` makes certificates (pure), and `identity` keeps the files of one node.
Only `authority` loads `cryptography`, and only when a certificate is made: a job of one node without a secret needs
none. An agent has that done by a process that ends then (`issuing`).

Every node derives the same key from the job's secret and its id, and so is the job's certificate authority itself.
Whoever has the secret is of the job; nobody hands certificates round, and none outlives the node that made it.
"""
