// Each kind of panel, drawn by Grafana's own components; heatmaps, which are not in its library, by hand.
import { getDisplayProcessor, getValueFormat, formattedValueToString } from '@grafana/data';
import { BarGauge, BigValue, TimeSeries } from '@grafana/ui';
import React from 'react';

import { lastOf, legendOf, seriesFrames } from './frames.js';

export function Graph({ panel, answers, times, range, width, height, theme }) {
  const frames = seriesFrames(panel, answers, times, theme);
  return (
    <TimeSeries
      frames={frames}
      structureRev={1}
      timeRange={range}
      timeZone="utc"
      width={width}
      height={height}
      legend={panel.options.legend}
    />
  );
}

export function Tiles({ panel, answers, times, width, height, theme }) {
  const frames = seriesFrames(panel, answers, times, theme);
  const each = Math.floor(width / Math.max(1, frames.length));
  return (
    <div style={{ display: 'flex' }}>
      {frames.map((frame, place) => {
        const field = frame.fields[1];
        const value = field.display(lastOf(field.values));
        return (
          <BigValue
            key={place}
            value={value}
            width={each}
            height={height}
            theme={theme}
            graphMode="area"
            colorMode="value"
            justifyMode="auto"
            textMode="value"
            sparkline={{ y: field }}
          />
        );
      })}
    </div>
  );
}

export function Gauges({ panel, answers, times, width, height, theme }) {
  const frames = seriesFrames(panel, answers, times, theme)
    .filter((frame) => lastOf(frame.fields[1].values) !== null)
    .sort((one, other) => lastOf(other.fields[1].values) - lastOf(one.fields[1].values));
  const top = Math.max(...frames.map((frame) => lastOf(frame.fields[1].values)), 0);
  const each = Math.min(44, Math.floor(height / Math.max(1, frames.length)) - 6);
  return frames.map((frame, place) => {
    const field = frame.fields[1];
    const config = { ...field.config, min: 0, max: panel.fieldConfig.defaults.max ?? top };
    const display = getDisplayProcessor({ field: { ...field, config }, theme, timeZone: 'utc' });
    const value = { ...display(lastOf(field.values)), title: field.state.displayName };
    return (
      <div key={place} style={{ marginBottom: 6 }}>
        <BarGauge
          value={value}
          field={config}
          display={display}
          theme={theme}
          orientation="horizontal"
          displayMode="basic"
          width={width}
          height={each}
          showUnfilled
        />
      </div>
    );
  });
}

export function Rows({ panel, answers, theme }) {
  const organize = panel.transformations.find((each) => each.id === 'organize').options;
  const hidden = { ...organize.excludeByName, __name__: true };
  const rows = new Map();
  panel.targets.forEach((target) => {
    for (const series of answers[target.refId] ?? []) {
      const key = JSON.stringify(series.metric);
      rows.set(key, { ...series.metric, ...rows.get(key), [`Value #${target.refId}`]: series.values.at(-1)[1] });
    }
  });
  const only = panel.targets.length === 1;
  const columns = [...new Set([...rows.values()].flatMap(Object.keys))].filter(
    (name) => !hidden[name] && !(only && name.startsWith('Value') && hidden.Value)
  );
  const format = getValueFormat(panel.fieldConfig.defaults.unit);
  const shown = (row, name) =>
    name.startsWith('Value #') ? formattedValueToString(format(Number(row[name]), 0)) : row[name];
  const renamed = (name) => organize.renameByName[name] ?? organize.renameByName[only ? 'Value' : name] ?? name;
  const title = (name) => (name.startsWith('Value #') ? renamed(name) : name);
  const cell = { padding: '6px 10px', textAlign: 'left', borderBottom: `1px solid ${theme.colors.border.weak}` };
  return (
    <table style={{ width: '100%', borderCollapse: 'collapse', fontSize: 12 }}>
      <thead>
        <tr>{columns.map((name) => <th key={name} style={{ ...cell, color: theme.colors.primary.text }}>{title(name)}</th>)}</tr>
      </thead>
      <tbody>
        {[...rows.values()].map((row, place) => (
          <tr key={place}>{columns.map((name) => <td key={name} style={cell}>{shown(row, name)}</td>)}</tr>
        ))}
      </tbody>
    </table>
  );
}

const DARK = [40, 24, 12], BRIGHT = [255, 152, 48];

function shade(share) {
  const weight = Math.sqrt(share);
  return `rgb(${DARK.map((from, place) => Math.round(from + (BRIGHT[place] - from) * weight)).join(',')})`;
}

export function Heat({ panel, answers, times, width, height, theme }) {
  const buckets = (answers.A ?? [])
    .map((series) => ({ le: Number(series.metric.le.replace('+Inf', 'Infinity')), values: new Map(series.values.map(([time, value]) => [Math.round(time * 1000), Number(value)])) }))
    .sort((one, other) => one.le - other.le);
  const counts = buckets.map((bucket, place) =>
    times.map((time) => Math.max(0, (bucket.values.get(time) ?? 0) - (place ? buckets[place - 1].values.get(time) ?? 0 : 0)))
  );
  const used = counts.map((row) => row.some((count) => count > 0.001));
  const first = Math.max(0, used.indexOf(true) - 1), last = Math.min(buckets.length - 1, used.lastIndexOf(true) + 1);
  const top = Math.max(1e-9, ...counts.flat());
  const left = 60, bottom = 22, format = getValueFormat('s');
  const rowHeight = (height - bottom) / (last - first + 1), columnWidth = (width - left) / times.length;
  const name = (le) => (le === Infinity ? '+Inf' : formattedValueToString(format(le)));
  const marks = times.filter((time) => time % 30000 === 0);
  const place = (time) => left + times.indexOf(time) * columnWidth;
  const text = { fill: theme.colors.text.secondary, fontSize: 11, fontFamily: theme.typography.fontFamily };
  return (
    <svg width={width} height={height}>
      {counts.slice(first, last + 1).map((row, number) =>
        row.map((count, column) =>
          count > 0.001 ? (
            <rect
              key={`${number}-${column}`}
              x={left + column * columnWidth}
              y={height - bottom - (number + 1) * rowHeight + 1}
              width={Math.max(1, columnWidth)}
              height={Math.max(1, rowHeight - 1)}
              fill={shade(count / top)}
            />
          ) : null
        )
      )}
      {buckets.slice(first, last + 1).map((bucket, number) => (
        <text key={number} x={left - 6} y={height - bottom - number * rowHeight - rowHeight / 2 + 4} textAnchor="end" {...text}>
          {name(bucket.le)}
        </text>
      ))}
      {marks.map((time) => (
        <text key={time} x={place(time)} y={height - 6} textAnchor="middle" {...text}>
          {new Date(time).toISOString().slice(11, 19)}
        </text>
      ))}
    </svg>
  );
}

export const KINDS = { timeseries: Graph, stat: Tiles, bargauge: Gauges, table: Rows, heatmap: Heat };
