"""Lightning 2: a Trainer, and Fabric, whose training stays alive when members change (docs/frameworks.md).

    from elaunch.integrations.lightning import Trainer  # in place of Lightning's
    from elaunch.integrations.lightning import Fabric, elastic  # in place of Lightning's

data      batches of a global size that does not depend on the members
parts     the environment, weights of losses, what all members know at an entry
loops     loops that commit, and go on where the last commit was
progress  what of a Trainer's state is neither a module nor an optimizer nor a scheduler
metrics   metrics of torchmetrics, which add up over an epoch
loggers   loggers that another worker takes over
configured what `configure_model` does, undone for other members
strategies  the Trainer's strategies
trainer   the Trainer
fabric    Fabric
"""

from __future__ import annotations

from elaunch.integrations.lightning.fabric import LiveFabric as Fabric
from elaunch.integrations.lightning.fabric import elastic
from elaunch.integrations.lightning.trainer import LiveTrainer as Trainer

__all__ = ["Fabric", "Trainer", "elastic"]
