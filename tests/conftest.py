"""What holds for every test."""

import signal

# Started from a script in the background, Python is told to ignore Ctrl-C, and so would be the commands under test.
signal.signal(signal.SIGINT, signal.default_int_handler)
