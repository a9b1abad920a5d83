// A dashboard of the chart with recorded answers of Prometheus, drawn on Grafana's grid: ?name=overview.
import { createTheme, dateTime, ThemeContext } from '@grafana/data';
import { GlobalStyles, PanelChrome } from '@grafana/ui';
import React from 'react';
import { createRoot } from 'react-dom/client';

import { KINDS } from './panels.jsx';

const WIDTH = 1600, GAP = 8, CELL = 30, COLUMNS = 24, PADDING = 8;

function place({ x, y, w, h }) {
  const column = (WIDTH - GAP) / COLUMNS;
  return {
    left: GAP + x * column,
    top: 56 + y * (CELL + GAP),
    width: w * column - GAP,
    height: h * (CELL + GAP) - GAP,
  };
}

function Panel({ panel, record, range, theme }) {
  const at = place(panel.gridPos);
  const box = { position: 'absolute', ...at };
  if (panel.type === 'row') {
    return <div style={{ ...box, fontSize: 16, fontWeight: 500, paddingTop: 4 }}>⌄ {panel.title}</div>;
  }
  const Kind = KINDS[panel.type];
  return (
    <div style={box}>
      <PanelChrome title={panel.title} width={at.width} height={at.height} padding="sm">
        {(width, height) => (
          <Kind
            panel={panel}
            answers={record.answers[panel.id]}
            times={record.times}
            range={range}
            width={width}
            height={height - PADDING}
            theme={theme}
          />
        )}
      </PanelChrome>
    </div>
  );
}

function Dashboard({ record, theme }) {
  const { dashboard, times } = record;
  const from = dateTime(times[0]), to = dateTime(times.at(-1));
  const range = { from, to, raw: { from, to } };
  return (
    <div style={{ width: WIDTH, height: record.height, position: 'relative', background: theme.colors.background.canvas }}>
      <div style={{ position: 'absolute', left: GAP + 4, top: 16, fontSize: 18, fontWeight: 500 }}>{dashboard.title}</div>
      {dashboard.panels.map((panel) => (
        <Panel key={panel.id} panel={panel} record={record} range={range} theme={theme} />
      ))}
    </div>
  );
}

const theme = createTheme({ colors: { mode: 'dark' } });
const name = new URLSearchParams(location.search).get('name');
const record = await (await fetch(`./records/${name}.json`)).json();
createRoot(document.getElementById('root')).render(
  <ThemeContext.Provider value={theme}>
    <GlobalStyles />
    <Dashboard record={record} theme={theme} />
  </ThemeContext.Provider>
);
