"""The demo on several nodes: each a daemon of its own on this machine, with memory of its own, that can be lost.

hosts.py       where a node is: an address on the loopback interface, or a network namespace
node.py        a node's daemon, processes and memory, found from outside; and how it dies
cluster.py     starts the daemons, starts lost ones anew, and takes everything away
schedule.py    which node is struck, where and when (pure)
corrupt.py     a byte of a replica, changed where it is kept
tags.py        the ranks' tags, wherever the ranks are
injector.py    the process that strikes
training.py    the run under flashrec
findings.py    what became of it, judged (pure)
report.py      what is said of it
command.py     all of it in order
"""
