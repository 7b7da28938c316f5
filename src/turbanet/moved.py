"""New names of what 0.6 named otherwise: old names and modules still load, with a warning that gives the new one."""

import importlib
import importlib.abc
import importlib.util
import sys
import types
import warnings
from typing import Any

# What moved, by where it is now; old=new where it is called otherwise.
PUBLIC = {
    "cluster": "Cluster ClusterHistory ClusterResults ShardsFailed fit_on_cluster=fit",
    "ensembles": (
        "accuracy_by_size brier_score confusion disagreement diversity expected_calibration_error "
        "greedy_weights mean_confusion member_scores negative_log_likelihood out_of_bag prediction_interval "
        "scores stacking_weights temperature without_nan"
    ),
    "evolution": "EvolutionHistory Genetic Tournament Truncation evolve population_based",
    "federated": "FederatedHistory client_epsilon local_sgd",
    "networks": "AlexNet LeNet LeNet5 MobileNet ResNet VGG dot_general lstm matmul_conv",
    "rl": ("AgentHistory Foraging PPOConfig Rewarded evaluate_agents evaluate_together train_agents train_together"),
}
PRIVATE = {
    ("cluster", "cluster"): "asked=validation given=shard_data",
    ("populations", "evolution"): "evolve=evolving genealogy generations genetics population_based=pbt variation",
    ("populations", "federated"): "federated=server local_sgd=averaging privacy rounds",
    ("populations", "rl"): "agents environments foraging learning rewards settings together=multi_agent",
    ("networks", "networks.cpu"): "batch_last conv pooling products recurrent=lstm",
    ("training", "checkpoints"): "checkpoint describe saved=serialization",
    ("training", "core"): (
        "arrays contents fingerprint interrupt member metrics optimizers places=storage plan schedules stopping sums"
    ),
    ("training", "data"): "augment batches data=examples sampling weights=sample_weight",
}


def _pairs(listed):
    """Return the (old, new) names of a list."""
    return [(name.partition("=")[0], name.rpartition("=")[2]) for name in listed.split()]


NAMES = {old: f"{package}.{new}" for package, listed in PUBLIC.items() for old, new in _pairs(listed)}
MODULES = {f"{was}.{old}": f"{now}.{new}" for (was, now), listed in PRIVATE.items() for old, new in _pairs(listed)}
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
