"""unit/ values and decisions; contract/ one suite per interface; integration/ real jobs; faults/ jobs that are hurt."""
