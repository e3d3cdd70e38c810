"""Every error that BlockTrain raises on purpose, drawn as a tree.

BlockTrainError                 a person or a machine outside did something that cannot work
├── ConfigError                 a setting, its value, or two settings that contradict each other
├── DataError                   a corpus that is missing, empty, too short, unreadable or changed
├── CheckpointError             a run folder or checkpoint that is missing, damaged or of another shape
├── ProtocolError               bytes or fields from another machine that are not what the protocol says
├── ServingError                the blocks cannot give an answer now: a stage is gone, full, or does not hold what is needed
│   └── BusyError               as many texts as are allowed are being generated; it may be asked again
├── DivergedError               the loss or a gradient is not finite any more
├── ExperimentError             a process that an experiment started has ended with an error
└── MemoryLimitError            what was asked for does not fit, with the need and the have

Each message is one line that names the setting, field or file and says what to do. The command line prints it and exits
with `exit_code`; anything else that escapes is our own bug and keeps its traceback.
"""

from __future__ import annotations


def how_to_install(extra: str) -> str:
    """The command for an extra of this package, which is installed from its source."""
    return f"pip install -c constraints.txt '.[{extra}]' in BlockTrain's source folder"


class BlockTrainError(Exception):
    """Base of all deliberate errors; `exit_code` is what the command line returns for it."""

    exit_code = 2


class ConfigError(BlockTrainError):
    """A setting is unknown, out of range, or contradicts another; the message names it as `section.field`."""


class DataError(BlockTrainError):
    """A corpus cannot be used; the message names the file or corpus."""


class CheckpointError(BlockTrainError):
    """A run folder or checkpoint cannot be used; the message names the file."""


class ProtocolError(BlockTrainError):
    """What came over a wire is refused; the message names the field or tensor."""


class ServingError(BlockTrainError):
    """The chain of blocks cannot answer; the message names the stage or block."""

    exit_code = 1


class BusyError(ServingError):
    """No place is free; asking again a little later may succeed."""


class DivergedError(BlockTrainError):
    """Training left the finite numbers; nothing of that step was kept."""

    exit_code = 1


class ExperimentError(BlockTrainError):
    """A process that was started ended with an error; the message names it and the file with what it said."""

    exit_code = 1


class MemoryLimitError(BlockTrainError):
    """The machine cannot hold what was asked for; the message gives need and have in bytes."""
