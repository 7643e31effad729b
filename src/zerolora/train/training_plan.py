"""Everything that one training is told: the settings of `train`, and what `render` chose for it."""

from zerolora.config.settings import TrainingChoice, TrainSettings


class TrainingPlan(TrainSettings, TrainingChoice):
    """Settings of one training, frozen. The two halves have no field in common."""

    @classmethod
    def of(cls, settings: TrainSettings, choice: TrainingChoice) -> "TrainingPlan":
        """Return the plan of a run's settings and of its entry `zerolora` in zero.json."""
        return cls(**dict(settings), **dict(choice))
