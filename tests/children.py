"""Processes of tests come from one fork server that has imported a trainer once.

multiprocessing has one such server per process and starts it with the last list of modules that was
set, so there is one list. A child costs a second or two; without the server each would spend seven
on imports.
"""

import multiprocessing

children = multiprocessing.get_context("forkserver")
children.set_forkserver_preload(["tests.toy", "verl.trainer.ppo.asynchronous", "verl.tools.leases"])
