"""The Grafana dashboards and the alert rules of the chart, made from code: python -m helm.dashboards [--check]."""
