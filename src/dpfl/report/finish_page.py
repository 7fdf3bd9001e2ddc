"""The page of a site about a model that was delivered to it: for the site's own people alone."""

from dpfl.engine.finish_scores import FinishScores
from dpfl.report.rendering import Page, render


def finish_page(site: str, run: str, scores: FinishScores) -> str:
    """Return the page on what the model of a ``run`` and its personal finish are worth to a
    ``site``, by its ``scores``.
    """
    values = {"site": site, "scores": scores}
    return render(Page(title=f"{run} at {site}", template="finish", values=values))
