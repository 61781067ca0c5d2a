"""The inside of the sandbox: what runs in the process that `Sandbox` starts, and nowhere else.

A fresh interpreter runs `supervisor.main`; these modules import only one another and the standard
library, so it starts in milliseconds and knows nothing of the package around it.

    Sandbox (your process)
      └ supervisor      watches time and memory; new user, pid, network, ipc, uts namespaces
          └ init        pid 1 inside: builds the file system, then has no privileges; its end is
              │         the end of every process in the namespace, whatever they did to hide
              └ program limits, system call filter, exec
"""
