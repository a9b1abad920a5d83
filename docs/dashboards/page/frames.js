// What Prometheus answered to a panel's queries, as Grafana's data frames.
import { FieldType, getDisplayProcessor, toDataFrame } from '@grafana/data';

const TIME_ZONE = 'utc';

export function legendOf(format, labels) {
  return format.replace(/{{\s*(\w+)\s*}}/g, (_, name) => labels[name] ?? '').trim();
}

function overrideOf(panel, refId) {
  const found = panel.fieldConfig.overrides.find((each) => each.matcher.options === refId);
  const config = { custom: {} };
  for (const { id, value } of found?.properties ?? []) {
    if (id.startsWith('custom.')) {
      config.custom[id.slice('custom.'.length)] = value;
    } else {
      config[id] = value;
    }
  }
  return config;
}

function configOf(panel, refId) {
  const defaults = panel.fieldConfig.defaults;
  const own = overrideOf(panel, refId);
  return { ...defaults, ...own, custom: { ...defaults.custom, ...own.custom } };
}

function valueField(panel, refId, name, values, labels, place, theme) {
  const field = {
    name: 'Value',
    type: FieldType.number,
    values,
    labels,
    config: { ...configOf(panel, refId), displayNameFromDS: name },
    state: { displayName: name, seriesIndex: place },
  };
  field.display = getDisplayProcessor({ field, theme, timeZone: TIME_ZONE });
  return field;
}

// One frame for each series; each has a value, or null, at each of `times`.
export function seriesFrames(panel, answers, times, theme) {
  let place = 0;
  return panel.targets.flatMap((target) =>
    (answers[target.refId] ?? []).map((series) => {
      const at = new Map(series.values.map(([time, value]) => [Math.round(time * 1000), Number(value)]));
      const name = legendOf(target.legendFormat, series.metric) || panel.title;
      const values = times.map((time) => at.get(time) ?? null);
      const time = { name: 'Time', type: FieldType.time, values: times, config: {} };
      time.display = getDisplayProcessor({ field: time, theme, timeZone: TIME_ZONE });
      const value = valueField(panel, target.refId, name, values, series.metric, place, theme);
      place += 1;
      return { ...toDataFrame({ refId: target.refId, fields: [] }), fields: [time, value], length: times.length };
    })
  );
}

export function lastOf(values) {
  for (let place = values.length - 1; place >= 0; place -= 1) {
    if (values[place] !== null) {
      return values[place];
    }
  }
  return null;
}
