"""``csd-policy train``: LightningCLI over the modules and data modules of ``trainers``."""

from collections.abc import Sequence

import lightning as L
from lightning.pytorch.cli import LightningCLI


def main(args: Sequence[str] | None = None) -> None:
    """Run ``fit``, ``validate`` or ``test`` with the given command-line arguments."""
    LightningCLI(
        L.LightningModule,
        L.LightningDataModule,
        subclass_mode_model=True,
        subclass_mode_data=True,
        seed_everything_default=0,
        save_config_kwargs={"config_filename": "resolved_config.yaml", "overwrite": True},
        args=list(args) if args is not None else None,
    )


if __name__ == "__main__":
    main()
