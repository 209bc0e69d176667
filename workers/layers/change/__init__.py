"""How the state of a model in layers follows a change of plan.

`held_state` is what each worker tells of its state, `migration_plan` compares that with what the next plan asks for,
`migration` moves it during a step, and `assembly` puts together what arrives.
"""
