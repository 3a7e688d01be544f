"""An environment of verifiers for any taskset: after each of the first answers the user says how long it was."""

import verifiers.v1 as vf


class AskedAgainConfig(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig()
    times: int = 1


class AskedAgain(vf.Env[AskedAgainConfig]):
    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        async with agents.agent.interaction(task) as conversation:
            said = await conversation.turn()
            for _ in range(self.config.times):
                if not said.terminated:
                    said = await conversation.turn(f"no: {len(said.last_reply)}")


__all__ = ["AskedAgain"]
