"""How the state of a model in layers follows a change of plan.

`standing` is what each worker tells of the state it has, `survey` compares that with what the next plan asks for,
`migration` moves it during a step, and `assembly` puts together what arrives.
"""
