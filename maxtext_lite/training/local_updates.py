"""Local updates (DiLoCo): replicas train parameters of their own and are synchronised every few steps.

Source: Douillard et al. 2023, arXiv:2311.08105, algorithm 1. With outer learning rate 1 and momentum 0 it is local SGD:
the plain mean of the replicas.
"""

import dataclasses

import jax
import jax.numpy as jnp

from maxtext_lite.config import LocalUpdatesConfig
from maxtext_lite.parallel import Params, Tree
from maxtext_lite.training.arrays import as_float32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OuterState:
    """The state shared by all replicas: the parameters of the last synchronisation and the outer momentum.

    Attributes:
      momentum: float32, in the shapes of the parameters; None where diloco_outer_momentum is 0.
      master: the parameters in float32, where the replicas have float32 masters; otherwise None.
    """

    params: Params
    momentum: Params | None
    master: Params | None = None


@dataclasses.dataclass(frozen=True)
class LocalUpdates:
    """Replicas that train apart and are synchronised.

    Attributes:
      num_replicas: sets of parameters, a multiple of the data axis.
      sync_period: steps between synchronisations.
      outer_lr: learning rate of the outer Nesterov SGD.
      outer_momentum: its momentum.
    """

    num_replicas: int
    sync_period: int
    outer_lr: float
    outer_momentum: float

    @classmethod
    def of(cls, config: LocalUpdatesConfig, num_replicas: int) -> "LocalUpdates":
        """The local updates of a config with this many replicas."""
        return cls(num_replicas, config.diloco_sync_period, config.diloco_outer_lr, config.diloco_outer_momentum)

    def copies(self, tree: Tree) -> Tree:
        """One copy for each replica: leaves [R, ...]."""
        return jax.tree.map(lambda x: jnp.broadcast_to(x, (self.num_replicas, *x.shape)), tree)

    def synchronised(
        self, params_R: Params, outer: OuterState, masters_R: Params | None = None
    ) -> tuple[Params, OuterState]:
        """The replicas' parameters [R, ...] and the shared state after a synchronisation.

        Masters are averaged where there are any: the parameters are the rounded average, and the replicas' masters
        become copies of `OuterState.master`.

        The outer gradient is outer - mean(replicas); its step is written as (1 - lr) outer + lr mean: a single replica
        with lr = 1 and no momentum keeps its parameters to the bit. Computed in float32.

        Args:
          masters_R: None without masters.
        """
        lr = self.outer_lr
        momentum = self.outer_momentum
        has_masters = outer.master is not None
        before = outer.master if has_masters else as_float32(outer.params)
        mean = jax.tree.map(lambda p: jnp.mean(p, axis=0), masters_R if has_masters else as_float32(params_R))
        after = jax.tree.map(lambda b, m: (1 - lr) * b + lr * m, before, mean)
        velocity = None
        if momentum:
            velocity = jax.tree.map(lambda v, b, m: momentum * v + (b - m), outer.momentum, before, mean)
            after = jax.tree.map(lambda a, v: a - lr * momentum * v, after, velocity)
        params = jax.tree.map(lambda new, old: new.astype(old.dtype), after, outer.params)
        return self.copies(params), OuterState(params, velocity, after if has_masters else None)

    def outer_state(self, params: Params, master: Params | None = None) -> OuterState:
        """The shared state before the first step; `master` is None without masters."""
        momentum = None
        if self.outer_momentum:
            momentum = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
        return OuterState(params, momentum, master)

    def outer_like(self, params: Tree, *, has_masters: bool) -> OuterState:
        """A tree like the shared state with `params`, such as shardings, for each part."""
        return OuterState(params, params if self.outer_momentum else None, params if has_masters else None)
