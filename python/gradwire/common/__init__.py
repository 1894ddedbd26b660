"""The modules of ``horovod.common`` that scripts import."""

from gradwire.common import exceptions as exceptions
from gradwire.common import process_sets as process_sets
from gradwire.common import util as util
