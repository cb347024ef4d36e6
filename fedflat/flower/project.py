"""A ready Flower project for an experiment: apps, configuration, certificates and keys for a trial, how to start."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedflat.core.devices import resolve
from fedflat.data import Federation
from fedflat.errors import InputError
from fedflat.experiment import Experiment
from fedflat.flower.admission import admission_of
from fedflat.flower.keys import DAYS, write_certificates, write_node_key
from fedflat.flower.secagg import check_summable

PORT = 8000

PYPROJECT = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "federation"
version = "1.0.0"
description = "A federated experiment, deployed with Flower"
license = "MIT"
dependencies = []  # fedflat[flower] is there before the apps are

[tool.hatch.build.targets.wheel]
packages = ["."]

[tool.flwr.app]
publisher = "fedflat"
fab-include = ["federation.py", "experiment.toml"]

[tool.flwr.app.components]
serverapp = "federation:server"
clientapp = "federation:client"

[tool.flwr.app.config]
out = "run"  # the run folder, where the server is started
clients = "clients.toml"  # who may join, in the same place; only the server reads it
"""

APPS = '''\
"""The two apps of this federation: one runs on the server, the other on every client."""

import logging
from pathlib import Path

from fedflat import Experiment
from fedflat.flower import client_app, named_data, server_app

logging.basicConfig(format="%(message)s")
logging.getLogger("fedflat").setLevel(logging.INFO)  # a line per round

experiment = Experiment.from_toml(Path(__file__).parent / "experiment.toml")

# For a trial, every client takes its part of the data set that the experiment names, and the server its test set. To
# train on data of your own, give instead of `data` below a function of the node's context that reads this client's
# samples, such as `def data(context): return x, y`, and to the server its own test set, or none.
data = named_data(experiment)

server = server_app(experiment, test=data, timeout=600, wait=600{secagg})
client = client_app(experiment, data=data{secagg})
'''

CONFIG = """\
[superlink]
default = "trial"

[superlink.trial]
address = "{host}:{port}"
root-certificates = "{authority}"

[superlink.simulation]
address = ":local:"
"""

README = """\
# A federation of {clients} clients

`experiment.toml` says what is trained, `federation.py` on which data. All commands are run in this folder, with
`pip install 'fedflat[flower]'` done, and after

```console
export FLWR_HOME=$PWD/flower FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1
```

The four commands:

```console
# 1. the server's link to the world
flower-superlink --host {host} --port {port} --ssl-ca-certfile keys/ca.pem --ssl-certfile keys/server.pem \\
    --ssl-keyfile keys/server.key --enable-supernode-auth --disable-runtime-dependency-installation

# 2. who may join: each client's public key, once
for n in {numbers}; do flwr supernode register keys/node-$n.pub trial; done

# 3. one node for each client, on the machine that holds its data (here: all on this one, client 0)
flower-supernode --superlink {host}:{port} --root-certificates keys/ca.pem \\
    --auth-supernode-private-key keys/node-0 --node-config 'client=0 key="keys/node-0" state="state"' --port 9100

# 4. train; if it was stopped, the same command continues with the round it was in
flwr run . trial --stream
```

Node n takes `keys/node-n` (twice), `client=n` and, where several are on one machine, a port of its own.

`clients.toml` is the server's list: the public key of every client, how many samples it has, and what samples are
like. Whoever says otherwise cannot join. A client without an entry `samples` counts for at most `max_weight` times the
median size; one without a `key` is bound to the key with which it first joins.

What comes out is in `run/`: `fedflat show run`. Clients keep what the method has them keep in `state/`; it never leaves
them.

Without any of this, on one machine (`pip install 'flwr[simulation]'`), one core for each client that trains:

```console
flwr run . simulation --stream --federation-config 'num-supernodes={clients} client-resources-num-cpus=1{gpus}' \\
    --run-config "out='$PWD/simulated' clients=''"
```

What comes out is in `simulated/`. Flower leaves a SuperLink of its own running for the next time; to end it,
`pkill -f 'flower-superlink --insecure --simulation'`.

**`keys/` is for trials only.** The certificates are signed by an authority that was made up on the spot, are valid for
{days} days, and all private keys were made on one machine. For anything else have a server certificate of your own
authority, and every client make its key itself (`ssh-keygen -t ecdsa -b 384 -N "" -f node`) and send you `node.pub`.
"""


LIST = """\
# Who may join, and with what. The server reads this file; clients need not have it.

"""


def write_project(
    folder: Path,
    experiment: Experiment,
    hosts: Sequence[str] = ("127.0.0.1", "localhost"),
    federation: Federation | None = None,
    secagg: bool = False,
) -> None:
    """Write a project into a new or empty folder.

    Args:
        folder: Where to.
        experiment: What the federation trains.
        hosts: Names and addresses of the server, the first to connect to.
        federation: The clients' data, where they can be read here: the list of clients then has their sizes.
        secagg: Clients send masked updates, of which the server learns the sum only.
    """
    if secagg:
        check_summable(experiment)
    if folder.exists() and any(folder.iterdir()):
        raise InputError(f"{folder} is not empty; choose another folder for the project")
    keys, flower = folder / "keys", folder / "flower"
    for made in (keys, flower):
        made.mkdir(parents=True, exist_ok=True)
    keys.chmod(0o700)
    write_certificates(keys, hosts)
    public = {client: write_node_key(keys, client) for client in range(experiment.clients)}
    listed = admission_of(public, federation, experiment.clients, experiment.dtype)
    summary: dict[str, Any] = {"clients": experiment.clients, "host": hosts[0], "port": PORT, "days": DAYS}
    # A core and, on GPUs, a part of one for each client that trains: as many side by side as `workers` says.
    share = f" client-resources-num-gpus={1 / (experiment.workers or 1):g}"
    device = str(resolve("auto")[0]) if experiment.device == "auto" else experiment.device  # it need not be here
    summary["gpus"] = share if device.startswith("cuda") else ""
    summary["authority"] = keys.resolve() / "ca.pem"
    numbers = "0" if experiment.clients == 1 else f"$(seq 0 {experiment.clients - 1})"
    texts = {
        "pyproject.toml": PYPROJECT,
        "federation.py": APPS.format(secagg=", secagg=True" if secagg else ""),
        "experiment.toml": experiment.to_toml(),
        "clients.toml": LIST + listed.text(),
        "flower/config.toml": CONFIG.format(**summary),
        "README.md": README.format(numbers=numbers, **summary),
        ".gitignore": "keys/\nflower/\nrun/\nsimulated/\nstate/\nfedflat-state/\n",
    }
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
