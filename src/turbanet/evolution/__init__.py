"""Evolution of swarms by selection, crossover and mutation, and population-based training."""

from turbanet.evolution.evolving import evolve
from turbanet.evolution.genealogy import EvolutionHistory
from turbanet.evolution.genetics import Genetic, Tournament, Truncation
from turbanet.evolution.pbt import population_based

__all__ = [
    "EvolutionHistory",
    "Genetic",
    "Tournament",
    "Truncation",
    "evolve",
    "population_based",
]
