"""Deploys a model that sleeps instead of computing: `sleeping_model.py SECONDS_PER_TOKEN MODEL [FLAG ...]`.

Application, admission, scheduler and tokenizer are the product's. A vector is random, with the token ids as its seed.
Prints "ready" when the model is served. Then prints the states of the replicas for each line of standard input.
"""

import json
import sys
import time
import zlib
from dataclasses import replace
from functools import partial

import numpy as np
from ray import serve

from penstock.server.cluster.ray_connection import connected
from penstock.server.cluster.ray_replica import applications_of
from penstock.server.cluster.ray_serve import delete_applications, deploy, start_proxies
from penstock.server.cluster.ray_settings import RayServeSettings
from penstock.server.commands.cli import _parser
from penstock.server.commands.model_arguments import settings_and_models


def sleeping_app(seconds_per_token, settings, application):
    from penstock.engine.core.array_runner import ArrayRunner
    from penstock.engine.core.runner import CompletedForward, ForwardTime
    from penstock.engine.protocol.batch_outputs import BatchOutputs, OutputArray
    from penstock.server.cluster.ray_replica import build_app

    def begin(self, chunks):
        ids = [np.asarray(chunk.sequence.tokens.token_ids, np.int32) for chunk in chunks]
        num_tokens = sum(map(len, ids))
        time.sleep(seconds_per_token * num_tokens)
        self._times.append(ForwardTime(0, num_tokens, seconds_per_token * num_tokens))
        rows = [np.random.default_rng(zlib.crc32(each.tobytes())).normal(size=self.info.embedding_size) for each in ids]
        values = np.stack([row / np.linalg.norm(row) for row in rows]).astype(np.float32)
        return CompletedForward(BatchOutputs.of(len(rows), [OutputArray(name="embedding", values=values)]))

    ArrayRunner.begin = begin
    return build_app(settings, application._replace(config=replace(application.config, in_process=True)))


def main() -> None:
    seconds_per_token, *words = sys.argv[1:]
    given = vars(_parser().parse_args(["ray", "serve", *words]))
    del given["run"]
    settings, (plan,) = settings_and_models(given, RayServeSettings)
    (application,) = applications_of([(plan.config, ("sleeping",), None)])
    with connected(settings.address, "warning"):
        start_proxies(settings)
        deploy(application, settings, partial(sleeping_app, float(seconds_per_token)))
        print("ready", flush=True)
        for _ in sys.stdin:
            (deployment,) = serve.status().applications[application.app].deployments.values()
            print(json.dumps(deployment.replica_states), flush=True)
        delete_applications([application])


if __name__ == "__main__":
    main()
