"""`fit` under jax.distributed: every process ends with the bits of a training by one."""

import socket
import subprocess
import sys

import numpy as np

PROGRAM = """
import sys
import jax

address, rank, count, out = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
jax.config.update("jax_cpu_collectives_implementation", "gloo")
if count > 1:
    jax.distributed.initialize(address, count, rank)
import numpy as np, optax, turbanet as tn

random = np.random.default_rng(0)
x = random.normal(size=(40, 3)).astype(np.float32)
y = (x @ random.normal(size=(3, 2))).argmax(-1).astype(np.int32)
swarm = tn.TurbaTrainState.swarm(tn.MLP((8, 2)), optax.adam(0.05), 10, input_size=3, seed=7)
rows = np.asarray(tn.bootstrap(jax.random.key(0), members=10, rows=40))
how = {"epochs": 150, "segment": 2, "batch_size": 10, "rows": rows, "plan": tn.Plan(1, block=1), "progress": False}
def digits(prediction, y):  # which float32 does not hold
    return 1 / 3 + float(prediction.sum())


how |= {"validation": (x[:9], y[:9]), "patience": 2, "min_delta": 0.01}
how["metric"] = {"accuracy": tn.accuracy, "digits": digits}
swarm, history = tn.fit(swarm, x, y, tn.softmax_cross_entropy, **how)
named = {f"leaf{i}": np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves((swarm.params, swarm.opt_state)))}
seen = {"train": history.train_loss, "validation": history.validation_loss, **history.validation_metric}
predicted = np.asarray(tn.predict(swarm, x))
np.savez(out, **named, **seen, id=np.asarray(swarm.id), epochs=history.epochs, predicted=predicted)
wrong = {"2 processes cannot share 1 members": (swarm[[0]], None), "keep no checkpoints": (swarm, out + ".kept")}
for sentence, (members, kept) in wrong.items() if count == 2 else ():
    try:
        tn.fit(members, x, y, tn.softmax_cross_entropy, epochs=1, checkpoints=kept, progress=False)
    except ValueError as error:
        assert sentence in str(error), error
    else:
        raise AssertionError(sentence)
"""


def ran(out, count):
    """What each of `count` processes ended with."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    told = [[address, str(rank), str(count), str(out / f"{count}-{rank}")] for rank in range(count)]
    how = {"stderr": subprocess.PIPE, "text": True}
    begun = [subprocess.Popen([sys.executable, "-c", PROGRAM, *each], **how) for each in told]
    told = [one.communicate(timeout=180)[1] for one in begun]
    assert [one.returncode for one in begun] == [0] * count, told
    return [np.load(out / f"{count}-{rank}.npz") for rank in range(count)]


def test_two_processes_end_as_one_does(tmp_path):
    (alone,) = ran(tmp_path, 1)
    both = ran(tmp_path, 2)
    assert min(alone["epochs"]) < max(alone["epochs"]) < 150  # all have stopped, some before others
    for one in both:
        for name in alone.files:
            np.testing.assert_array_equal(one[name], alone[name], err_msg=name)
