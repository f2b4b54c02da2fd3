"""What operators ask the server's twin, and plans that they let it carry out."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

from fastapi import FastAPI, Request
from pydantic import Field

from fineserve_runtime.server.admin import operated
from fineserve_runtime.server.doorman import ADMIN
from fineserve_runtime.server.parsing import parse
from fineserve_runtime.server.service import ModelRoster, Service
from fineserve_runtime.twin import Question, Twin
from fineserve_sim.experiment.file.schema import Strict

Groups = Mapping[str, Sequence[Sequence[int]]]
"""The devices of each engine, by model."""


class PlanRequest(Strict):
    """Search for ``seconds``, and with ``carry_out`` move the models."""

    seconds: Annotated[float, Field(ge=1, le=120)] = 10.0
    carry_out: bool = False


class Move(NamedTuple):
    model: str
    before: int
    after: int


def add_whatif(app: FastAPI, service: Service) -> None:
    @app.get(f"{ADMIN}whatif")
    async def present() -> dict[str, Any]:
        """How far the simulator is off."""
        return await _answered(service, Question())

    @app.post(f"{ADMIN}whatif")
    async def whatif(request: Request) -> dict[str, Any]:
        asked = parse(Question, request.state.body)
        request.state.gate.leave()
        return await _answered(service, asked)

    @app.post(f"{ADMIN}plan")
    async def plan(request: Request) -> dict[str, Any]:
        """The best plan that is found, and the moves that it takes; carried out, if told."""
        asked = parse(PlanRequest, request.state.body)
        request.state.gate.leave()
        return await operated(service.operate, lambda: _plan(service, asked))


async def _answered(service: Service, question: Question) -> dict[str, Any]:
    return await operated(service.operate, lambda: _twin(service).ask(question))


def _twin(service: Service) -> Twin:
    if service.twin is None:
        raise ValueError("this server has no twin")
    return service.twin


def _plan(service: Service, asked: PlanRequest) -> dict[str, Any]:
    twin = _twin(service)
    answer = twin.ask(Question(seconds=asked.seconds))
    wanted: Groups = answer["plan"]["systems"][0]["placement"]["groups"]
    moves = moves_to(wanted, twin.groups(), twin.devices) if asked.carry_out else None
    if moves is not None:
        _carry_out(service, moves)
    return answer | {"groups": wanted, "moves": None if moves is None else [move._asdict() for move in moves]}


def moves_to(wanted: Groups, present: Groups, devices: Collection[int]) -> list[Move]:
    """The moves from the present devices to the devices of a plan. Raises ValueError for a plan that no running server can
    carry out."""
    found = []
    for model, groups in present.items():
        if len(groups) != 1 or len(groups[0]) != 1:
            raise ValueError(f"model {model} has several devices, which a running server cannot change")
        if not wanted.get(model):
            raise ValueError(f"the plan has no device for model {model}")
        if len(wanted[model]) != 1 or len(wanted[model][0]) != 1:
            raise ValueError(
                f"the plan gives model {model} several devices; a running server has one engine of a model"
            )
        ((before,),), ((after,),) = groups, wanted[model]
        if after not in devices:
            raise ValueError(f"the plan wants model {model} on device {after}, which no engine of the start opened")
        if before != after:
            found.append(Move(model, before, after))
    return found


def _carry_out(service: Service, moves: Sequence[Move]) -> None:
    """Move one model after the other. Its requests finish first, and new requests wait at the door."""
    roster = service.roster
    if not moves:
        return
    if roster is None:
        raise ValueError("this server moves no models")
    roster.check_moves({move.model: move.after for move in moves})
    for move in moves:
        _move(service, roster, move)


def _move(service: Service, roster: ModelRoster, move: Move) -> None:
    service.log("model moves", move._asdict())
    service.moving.add(move.model)
    try:
        roster.move(move.model, move.after)
    finally:
        service.moving.discard(move.model)
    service.log("model moved", move._asdict())
