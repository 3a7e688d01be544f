"""An environment of verifiers for any taskset: after each of the first answers the user replies with its length."""

import verifiers.v1 as vf


class AskedAgainConfig(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig()
    times: int = 1


class AskedAgain(vf.Env[AskedAgainConfig]):
    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        async with agents.agent.interaction(task) as conversation:
            answer = await conversation.turn()
            for _ in range(self.config.times):
                if not answer.terminated:
                    answer = await conversation.turn(f"no: {len(answer.last_reply)}")


__all__ = ["AskedAgain"]
