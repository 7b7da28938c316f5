"""Names, colours and markers of training methods, frameworks and workloads in figures, tables and metrics."""

from typing import NamedTuple


class Label(NamedTuple):
    """A method's label: `key` is its name in CSV files and in metrics."""

    key: str
    colour: str
    marker: str


OURS = "TurbaNet"
USUAL = "TurbaNet without its kernel"
SCAN = "scan over vmap"
SCAN_ALL = "scan over vmap, all devices"
SCAN_PROCESSES = "scan over vmap, process per core"
STEPS = "one step per dispatch"
FUNC = "torch.func vmap"
FUNC_GRAPH = "torch.func vmap, CUDA graph"
GRAPH = "PyTorch, CUDA graph of a step"
STACKED = "stacked products, torch.compile"
COMPILED = "torch.compile"
LOOP = "PyTorch loop"
FUSED = "PyTorch loop, fused Adam"
PROCESSES = "PyTorch, process per core"
SERIAL = "PyTorch, serial, all threads"
SERIAL_ONE = "PyTorch, serial, one thread"
SKLEARN = "scikit-learn"
SKLEARN_ONE = "scikit-learn, 1 process"
SKLEARN_TWO = "scikit-learn, 2 processes"
HOGWILD = "Hogwild"
SHARED = "Hogwild, shared optimizer"
DDP = "DistributedDataParallel"
DOWNPOUR = "parameter server"
LOCAL = "TurbaNet, local SGD"
DILOCO = "TurbaNet, DiLoCo"
SWEPT = (OURS, SCAN, STEPS, FUNC, LOOP, FUSED, PROCESSES)  # of the sweep stage; the suite measures all
IN_JAX = OURS, SCAN, SCAN_ALL, SCAN_PROCESSES, STEPS
METHODS = (*IN_JAX, FUNC, COMPILED, LOOP, FUSED, PROCESSES, SKLEARN)  # of `methods.runs`

LABELS = {
    OURS: Label("turbanet", "#0173b2", "o"),
    SCAN: Label("scan_vmap", "#56b4e9", "X"),
    SCAN_ALL: Label("scan_vmap_all", "#0a4f73", "x"),
    SCAN_PROCESSES: Label("scan_vmap_processes", "#7fb3d5", "+"),
    STEPS: Label("per_step_vmap", "#ca9161", "P"),
    FUNC: Label("torch_func", "#029e73", "^"),
    COMPILED: Label("torch_compile", "#fbafe4", "<"),
    LOOP: Label("torch_loop", "#de8f05", "s"),
    FUSED: Label("torch_loop_fused", "#d55e00", "D"),
    PROCESSES: Label("torch_processes", "#cc78bc", "v"),
    SERIAL: Label("torch_serial", "#de8f05", "s"),
    SERIAL_ONE: Label("torch_serial_one", "#ece133", ">"),
    SKLEARN: Label("sklearn", "#949494", "*"),
    SKLEARN_ONE: Label("sklearn_1", "#949494", "*"),
    SKLEARN_TWO: Label("sklearn_2", "#949494", "p"),
    HOGWILD: Label("hogwild", "#029e73", "^"),
    SHARED: Label("hogwild_shared", "#ca9161", "P"),
    DDP: Label("ddp", "#cc78bc", "v"),
    DOWNPOUR: Label("downpour", "#d55e00", "D"),
    LOCAL: Label("local_sgd", "#0173b2", "o"),
    DILOCO: Label("diloco", "#56b4e9", "X"),
}
KEYS = {method: label.key for method, label in LABELS.items()}
NAMES = {key: method for method, key in KEYS.items()}
MARKERS = {method: label.marker for method, label in LABELS.items()}
COLOURS = {method: label.colour for method, label in LABELS.items()} | {
    "PyTorch": LABELS[LOOP].colour,
    "persistence": "#595959",
    "truth": "#1a1a1a",
    "member": "#999999",
}

FRAMEWORKS = {  # data-parallel training of one network; the last two and "no sums" train a network on each worker
    "PyTorch DDP": Label("pytorch_ddp", "#de8f05", "s"),
    "PyTorch DDP, 16 bits": Label("pytorch_ddp_fp16", "#ece133", "D"),
    "PyTorch, no sums": Label("pytorch_alone", "#d55e00", "v"),
    "JAX": Label("jax", "#029e73", "^"),
    "JAX, process each": Label("jax_processes", "#66c2a5", "<"),
    "Keras on JAX": Label("keras", "#cc78bc", "P"),
    "TensorFlow": Label("tensorflow", "#ca9161", "X"),
    "MXNet": Label("mxnet", "#949494", "*"),
    "Horovod, PyTorch": Label("horovod_pytorch", "#fbafe4", "h"),
    "Horovod, TensorFlow": Label("horovod_tensorflow", "#7a4e2d", "p"),
    "TurbaNet swarm": Label("swarm", LABELS[OURS].colour, "o"),
    "TurbaNet, process each": Label("swarm_processes", "#56b4e9", "8"),
}
FRAMEWORK_NAMES = {label.key: name for name, label in FRAMEWORKS.items()}

CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")

WORKLOADS = {
    "sweep-small": "small sweep",
    "sweep-large": "large sweep",
    "mnist": "MNIST",
    "stocks": "stocks",
    "lenet": "LeNet",
    "mobilenet": "MobileNet",
    "vgg": "VGG",
    "vgg11": "VGG-11",
    "resnet": "ResNet-20",
    "lenet5": "LeNet-5",
    "alexnet": "AlexNet",
}  # names of networks and workloads in figures and tables
