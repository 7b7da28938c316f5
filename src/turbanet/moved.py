"""New names of what 0.6 named otherwise: old names and modules still load, with a warning that gives the new one."""

import importlib
import importlib.abc
import importlib.util
import sys
import types
import warnings
from typing import Any

NAMES = {  # turbanet.<old>: turbanet.<new>
    "AgentHistory": "rl.AgentHistory",
    "AlexNet": "networks.AlexNet",
    "Cluster": "cluster.Cluster",
    "ClusterHistory": "cluster.ClusterHistory",
    "ClusterResults": "cluster.ClusterResults",
    "EvolutionHistory": "evolution.EvolutionHistory",
    "FederatedHistory": "federated.FederatedHistory",
    "Foraging": "rl.Foraging",
    "Genetic": "evolution.Genetic",
    "LeNet": "networks.LeNet",
    "LeNet5": "networks.LeNet5",
    "MobileNet": "networks.MobileNet",
    "PPOConfig": "rl.PPOConfig",
    "ResNet": "networks.ResNet",
    "Rewarded": "rl.Rewarded",
    "ShardsFailed": "cluster.ShardsFailed",
    "Tournament": "evolution.Tournament",
    "Truncation": "evolution.Truncation",
    "VGG": "networks.VGG",
    "accuracy_by_size": "ensembles.accuracy_by_size",
    "brier_score": "ensembles.brier_score",
    "client_epsilon": "federated.client_epsilon",
    "confusion": "ensembles.confusion",
    "disagreement": "ensembles.disagreement",
    "diversity": "ensembles.diversity",
    "dot_general": "networks.dot_general",
    "evaluate_agents": "rl.evaluate_agents",
    "evaluate_together": "rl.evaluate_together",
    "evolve": "evolution.evolve",
    "expected_calibration_error": "ensembles.expected_calibration_error",
    "fit_on_cluster": "cluster.fit",
    "greedy_weights": "ensembles.greedy_weights",
    "local_sgd": "federated.local_sgd",
    "lstm": "networks.lstm",
    "matmul_conv": "networks.matmul_conv",
    "mean_confusion": "ensembles.mean_confusion",
    "member_scores": "ensembles.member_scores",
    "negative_log_likelihood": "ensembles.negative_log_likelihood",
    "out_of_bag": "ensembles.out_of_bag",
    "population_based": "evolution.population_based",
    "prediction_interval": "ensembles.prediction_interval",
    "scores": "ensembles.scores",
    "stacking_weights": "ensembles.stacking_weights",
    "temperature": "ensembles.temperature",
    "train_agents": "rl.train_agents",
    "train_together": "rl.train_together",
    "without_nan": "ensembles.without_nan",
}
MODULES = {  # turbanet.<old>: turbanet.<new>, of modules
    "cluster.asked": "cluster.validation",
    "cluster.given": "cluster.shard_data",
    "populations.agents": "rl.agents",
    "populations.environments": "rl.environments",
    "populations.evolve": "evolution.evolving",
    "populations.federated": "federated.server",
    "populations.foraging": "rl.foraging",
    "populations.genealogy": "evolution.genealogy",
    "populations.generations": "evolution.generations",
    "populations.genetics": "evolution.genetics",
    "populations.learning": "rl.learning",
    "populations.local_sgd": "federated.averaging",
    "populations.population_based": "evolution.pbt",
    "populations.privacy": "federated.privacy",
    "populations.rewards": "rl.rewards",
    "populations.rounds": "federated.rounds",
    "populations.settings": "rl.settings",
    "populations.together": "rl.multi_agent",
    "populations.variation": "evolution.variation",
    "training.arrays": "core.arrays",
    "training.augment": "data.augment",
    "training.batches": "data.batches",
    "training.checkpoint": "checkpoints.checkpoint",
    "training.contents": "core.contents",
    "training.data": "data.examples",
    "training.describe": "checkpoints.describe",
    "training.fingerprint": "core.fingerprint",
    "training.interrupt": "core.interrupt",
    "training.mapped": "data.memmap",
    "training.member": "core.member",
    "training.metrics": "core.metrics",
    "training.optimizers": "core.optimizers",
    "training.plan": "core.plan",
    "training.sampling": "data.sampling",
    "training.schedules": "core.schedules",
    "training.stopping": "core.stopping",
    "training.sums": "core.sums",
    "training.places": "core.storage",
    "training.saved": "checkpoints.serialization",
    "training.weights": "training.sample_weight",
}
FOLDERS = {"populations"}  # packages of 0.6 that no longer exist


def find(name: str) -> Any:
    """Return what 0.6 named `turbanet.<name>`; AttributeError for a name that it did not have."""
    if name not in NAMES:
        raise AttributeError(f"module 'turbanet' has no attribute {name!r}")
    warnings.warn(f"turbanet.{name} is now turbanet.{NAMES[name]}.", DeprecationWarning, stacklevel=3)
    package, attribute = NAMES[name].split(".")
    return getattr(importlib.import_module(f"turbanet.{package}"), attribute)


class Federated(types.ModuleType):
    """The type of `turbanet.federated`, a package that was a function in 0.6 and can still be called."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Train as the function of 0.6 did."""
        warnings.warn("turbanet.federated is now turbanet.federated.train.", DeprecationWarning, stacklevel=2)
        return self.train(*args, **kwargs)


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """A finder of modules of 0.6 by their old names, which pickles hold."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        """Return the spec of a module of 0.6, None for any other."""
        package, _, name = fullname.partition(".")
        if package != "turbanet" or name not in MODULES.keys() | FOLDERS:
            return None
        return importlib.util.spec_from_loader(fullname, self, is_package=name in FOLDERS)

    def exec_module(self, module: Any) -> None:
        """Put the present module in place of an old one."""
        name = module.__name__.partition(".")[2]
        if name in MODULES:
            warnings.warn(f"turbanet.{name} is now turbanet.{MODULES[name]}.", DeprecationWarning, stacklevel=2)
            sys.modules[module.__name__] = importlib.import_module(f"turbanet.{MODULES[name]}")
