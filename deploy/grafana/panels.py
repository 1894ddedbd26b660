"""Builders for panels with a title, a description, a unit and queries.

All of them are required. `generate.py` builds the dashboards from the panels.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

from grafana_foundation_sdk.builders import bargauge, common, heatmap, stat, table, timeseries
from grafana_foundation_sdk.builders import dashboard as dashboards
from grafana_foundation_sdk.builders import prometheus as queries
from grafana_foundation_sdk.models import common as kinds
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models import heatmap as heatmaps
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

# Label filters from the variables at the top of a dashboard.
JOB = 'gradwire_job="$job"'
HOSTS = f'{JOB}, host=~"$host"'
RANKS = f'{JOB}, rank=~"$rank"'
NODES = f'{JOB}, node_host=~"$host"'
SOURCE = models.DataSourceRef(type_val="prometheus", uid="$datasource")
# The grid has 24 columns.
WIDTH = 24
TAG = "gradwire"
P = TypeVar("P")


class Query(NamedTuple):
    """A query and the legend of its series."""

    expr: str
    legend: str = "__auto"


def rate(metric: str, labels: str = JOB) -> str:
    """The per-second rate of a counter."""
    return f"rate({metric}{{{labels}}}[$__rate_interval])"


def increase(metric: str, labels: str = JOB) -> str:
    """The increase of a counter over the dashboard's time range."""
    return f"increase({metric}{{{labels}}}[$__range])"


def percentiles(metric: str, labels: str, by: str = "", name: str = "") -> list[Query]:
    """The median and the 99th percentile of a histogram."""
    levels = f"{by}, le" if by else "le"
    buckets = f"sum by ({levels}) ({rate(metric + '_bucket', labels)})"
    return [
        Query(f"histogram_quantile({level}, {buckets})", f"{name} {text}".strip())
        for level, text in [(0.5, "median"), (0.99, "99 %")]
    ]


def _common(panel: P, title: str, about: str, unit: str, size: tuple[int, int]) -> P:
    """Sets the properties common to all panels."""
    width, height = size
    # All builders have these methods, but no common type.
    builder: Any = panel
    return (
        builder.title(title)
        .description(about)
        .unit(unit)
        .datasource(SOURCE)
        .span(width)
        .height(height)
    )


def _query(number: int, query: Query) -> queries.Dataquery:
    """One query of a panel, named A, B and so on."""
    name = chr(ord("A") + number)
    return queries.Dataquery().expr(query.expr).legend_format(query.legend).ref_id(name)


def lines(
    title: str, about: str, unit: str, *given: Query, signed: bool = False
) -> timeseries.Panel:
    """Values over time. The axis starts at 0, unless values may be negative."""
    panel = _common(timeseries.Panel(), title, about, unit, (12, 8))
    panel = panel if signed else panel.min(0)
    for number, query in enumerate(given):
        panel = panel.with_target(_query(number, query).range())
    legend = common.VizLegendOptions().show_legend(True).calcs(["mean", "max"])
    legend = legend.display_mode(kinds.LegendDisplayMode.TABLE)
    tooltip = common.VizTooltipOptions().mode(kinds.TooltipDisplayMode.MULTI)
    return (
        panel.fill_opacity(10)
        .show_points(kinds.VisibilityMode.NEVER)
        .legend(legend.placement(kinds.LegendPlacement.BOTTOM))
        .tooltip(tooltip.sort(kinds.SortOrder.DESCENDING))
    )


def number(
    title: str, about: str, unit: str, query: Query, *, bad_from: float | None = None
) -> stat.Panel:
    """The current value, red from `bad_from` on.

    A small graph shows its history, unless the query covers the whole time range or has a legend.
    """
    panel = _common(stat.Panel(), title, about, unit, (4, 4))
    steps = [models.Threshold(color="green" if bad_from is not None else "text")]
    if bad_from is not None:
        steps.append(models.Threshold(value=bad_from, color="red"))
    thresholds = dashboards.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(steps)
    named = query.legend != "__auto"
    past = not named and "$__range" not in query.expr
    return (
        panel.thresholds(thresholds)
        .with_target(_query(0, query).range() if past else _query(0, query).instant())
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
        .graph_mode(kinds.BigValueGraphMode.AREA if past else kinds.BigValueGraphMode.NONE)
        .text_mode(kinds.BigValueTextMode.VALUE_AND_NAME if named else kinds.BigValueTextMode.VALUE)
    )


def ranking(title: str, about: str, unit: str, query: Query) -> bargauge.Panel:
    """The largest values, as bars."""
    panel = _common(bargauge.Panel(), title, about, unit, (12, 8)).min(0)
    return (
        panel.with_target(_query(0, query).instant())
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
        .orientation(kinds.VizOrientation.HORIZONTAL)
        .display_mode(kinds.BarGaugeDisplayMode.BASIC)
    )


def times(title: str, about: str, metric: str, labels: str) -> heatmap.Panel:
    """The distribution of the durations in a histogram, over time."""
    counts = f"sum by (le) (increase({metric}_bucket{{{labels}}}[$__rate_interval]))"
    target = _query(0, Query(counts, "{{le}}")).format(PromQueryFormat.HEATMAP).range()
    color = heatmap.HeatmapColorOptions().mode(heatmaps.HeatmapColorMode.SCHEME)
    return (
        _common(heatmap.Panel(), title, about, "s", (12, 8))
        .with_target(target)
        .calculate(False)
        .y_axis(heatmap.YAxisConfig().unit("s"))
        .cell_values(heatmap.CellValues().unit("short"))
        .color(color.scheme("Blues").steps(64))
    )


def rows(title: str, about: str, query: Query, hidden: list[str]) -> table.Panel:
    """The labels of series as a table, without those in `hidden`."""
    target = _query(0, query).format(PromQueryFormat.TABLE).instant()
    without = {"excludeByName": dict.fromkeys(hidden, True)}
    return (
        _common(table.Panel(), title, about, "none", (12, 8))
        .with_target(target)
        .with_transformation(models.DataTransformerConfig(id_val="organize", options=without))
    )


def matrix(title: str, about: str, unit: str, query: Query, row: str, column: str) -> table.Panel:
    """A table with a row for each value of one label and a column for each value of another."""
    target = _query(0, query).format(PromQueryFormat.TABLE).instant()
    fields = {"rowField": row, "columnField": column, "valueField": "Value"}
    grouping = models.DataTransformerConfig(id_val="groupingToMatrix", options=fields)
    return (
        _common(table.Panel(), title, about, unit, (WIDTH, 8))
        .with_target(target)
        .with_transformation(grouping)
    )


def _values(name: str, label: str, about: str, query: str) -> dashboards.QueryVariable:
    """A variable for the values of a label."""
    return (
        dashboards.QueryVariable(name)
        .label(label)
        .description(about)
        .datasource(SOURCE)
        .query({"query": query, "refId": f"variable-{name}"})
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(models.VariableSort.NATURAL_ASC)
    )


def _any(variable: dashboards.QueryVariable) -> dashboards.QueryVariable:
    """The same with multiple selection; initially, all values are selected."""
    every = models.VariableOption(selected=True, text="All", value="$__all")
    return variable.multi(True).include_all(True).all_value(".*").current(every)


def dashboard(uid: str, title: str, about: str, with_ranks: bool) -> dashboards.Dashboard:
    """A dashboard without panels, with variables for the job, its hosts and its ranks."""
    source = dashboards.DatasourceVariable("datasource").label("Data source").type("prometheus")
    job = "label_values(gradwire_build_info, gradwire_job)"
    host = f"label_values(gradwire_build_info{{{JOB}}}, host)"
    rank = f"label_values(gradwire_daemon_rank_steps_total{{{HOSTS}}}, rank)"
    made = (
        dashboards.Dashboard(title)
        .uid(uid)
        .description(about)
        .tags([TAG])
        .editable()
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .time("now-30m", "now")
        .refresh("10s")
        .timezone("browser")
        .with_variable(source)
        .with_variable(_values("job", "Job", "The id of the job", job))
        .with_variable(_any(_values("host", "Host", "Hosts of the job", host)))
    )
    if with_ranks:
        about_ranks = "Ranks of these hosts"
        made = made.with_variable(_any(_values("rank", "Rank", about_ranks, rank)))
    others = dashboards.DashboardLink("Gradwire").type(models.DashboardLinkType.DASHBOARDS)
    return made.link(others.tags([TAG]).include_vars(True).keep_time(True).as_dropdown(True))
