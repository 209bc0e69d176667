"""How a job goes on after a change: candidate plans, their estimates and the choice. Pure; imports no torch."""
