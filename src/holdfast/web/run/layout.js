// Where the nodes of a graph stand: in layers, each behind what it depends on, with few crossings and no edge through a node.
//
// `nodes` are siblings and groups as the service has them: what a node depends on has the same parent, so each group is laid
// out by itself and is then one box of the group around it. Nothing here touches the document.

const LAYER_GAP = 38;
const GAP = 14;
const EDGE_GAP = 10;
const PADDING = 14;
const HEADER = 34;
const SWEEPS = 10;
const GRID_FROM = 7;
const ROW_GAP = 34;
const ROW_END = 22;
const MOST_BROKEN = 1;
const MUCH_LONGER = 1.3;

// `sizeOf(node)` returns [width, height] of one that has nothing in it. `isDown` goes from the top, else from the left.
// What is longer than `most` goes on in the next row, like a text, where few edges are broken by that.
export function layout(nodes, sizeOf, { isDown = false, most = 1200 } = {}) {
  const members = new Map();
  for (const node of nodes) {
    const parent = node.parent ?? null;
    if (!members.has(parent)) members.set(parent, []);
    members.get(parent).push(node);
  }
  const sizes = new Map();
  const inner = new Map();
  for (const parent of inwards(members)) {
    const level = members.get(parent);
    for (const node of level) {
      const found = inner.get(node.id);
      const [width, height] = found
        ? [Math.max(found.width, sizeOf(node)[0]) + 2 * PADDING, found.height + HEADER + PADDING]
        : sizeOf(node);
      sizes.set(node.id, isDown ? { along: height, across: width } : { along: width, across: height });
    }
    inner.set(parent, upright(place(level, sizes, most), isDown));
  }
  return gather(members, inner);
}

// The groups, each after those that are in it.
function inwards(members) {
  const order = [null];
  for (const parent of order) for (const node of members.get(parent) ?? []) if (members.has(node.id)) order.push(node.id);
  return order.filter((parent) => members.has(parent)).reverse();
}

// One level, as if it went from left to right: `along` is the direction of time.
function place(level, sizes, most) {
  if (level.length === 0) return { boxes: [], edges: [], along: 0, across: 0 };
  const edges = level.some((node) => (node.depends_on ?? []).length > 0);
  if (!edges && level.length >= GRID_FROM) return grid(level, sizes);
  const graph = withBends(level, layersOf(level), sizes);
  order(graph);
  align(graph);
  return drawn(level, graph, rowsOf(graph, most));
}

// Many that wait for nothing in their group stand in rows, about as wide as high.
function grid(level, sizes) {
  const along = Math.max(...level.map((node) => sizes.get(node.id).along));
  const across = Math.max(...level.map((node) => sizes.get(node.id).across));
  const ratio = (along + GAP) / (across + GAP);
  const columns = Math.max(1, Math.round(Math.sqrt((level.length * 1.6) / ratio)));
  const boxes = level.map((node, n) => ({
    id: node.id,
    along: (n % columns) * (along + GAP),
    across: Math.floor(n / columns) * (across + GAP),
    size: sizes.get(node.id),
  }));
  const rows = Math.ceil(level.length / columns);
  return {
    boxes,
    edges: [],
    along: Math.min(columns, level.length) * (along + GAP) - GAP,
    across: rows * (across + GAP) - GAP,
  };
}

export function layersOf(level) {
  const here = new Map(level.map((node) => [node.id, node]));
  const waits = new Map();
  const behind = new Map();
  for (const node of level) {
    const before = new Set((node.depends_on ?? []).filter((id) => here.has(id)));
    waits.set(node.id, before.size);
    for (const id of before) behind.set(id, [...(behind.get(id) ?? []), node]);
  }
  const layers = [];
  let ready = level.filter((node) => waits.get(node.id) === 0);
  while (ready.length > 0) {
    layers.push(ready);
    const next = [];
    for (const node of ready)
      for (const each of behind.get(node.id) ?? []) {
        waits.set(each.id, waits.get(each.id) - 1);
        if (waits.get(each.id) === 0) next.push(each);
      }
    ready = next;
  }
  return layers;
}

// Edges over several layers bend in each of them. Those from one node share their bends, so there are never many.
function withBends(level, layers, sizes) {
  const graph = { layers: layers.map(() => []), links: [], at: new Map() };
  const add = (layer, id, size) => {
    const item = { id, layer, size, before: [], behind: [], across: 0 };
    graph.layers[layer].push(item);
    return item;
  };
  layers.forEach((layer, n) => layer.forEach((node) => graph.at.set(node.id, add(n, node.id, sizes.get(node.id)))));
  const bends = new Map();
  const link = (from, to) => {
    if (from.behind.includes(to)) return;
    from.behind.push(to);
    to.before.push(from);
  };
  for (const node of level) {
    const to = graph.at.get(node.id);
    for (const id of node.depends_on ?? []) {
      const from = graph.at.get(id);
      if (!from) continue;
      const path = [from];
      for (let n = from.layer + 1; n < to.layer; n += 1) {
        const key = `${n}\u0000${id}`;
        if (!bends.has(key)) bends.set(key, add(n, null, { along: 0, across: 2 }));
        link(path.at(-1), bends.get(key));
        path.push(bends.get(key));
      }
      link(path.at(-1), to);
      path.push(to);
      graph.links.push({ from: id, to: node.id, path });
    }
  }
  return graph;
}

// Orders each layer by the middle of its neighbours, to and fro, and keeps the order with the fewest crossings.
function order({ layers }) {
  const number = () => layers.forEach((layer) => layer.forEach((item, n) => (item.place = n)));
  number();
  let best = layers.map((layer) => [...layer]);
  let fewest = crossings(layers);
  for (let sweep = 0; sweep < SWEEPS && fewest > 0; sweep += 1) {
    const isForth = sweep % 2 === 0;
    const sides = isForth ? layers.keys() : [...layers.keys()].reverse();
    for (const n of sides) {
      const layer = layers[n];
      for (const item of layer) {
        const near = isForth ? item.before : item.behind;
        item.middle = near.length === 0 ? item.place : near.reduce((sum, each) => sum + each.place, 0) / near.length;
      }
      layer.sort((one, other) => one.middle - other.middle || one.place - other.place);
      layer.forEach((item, place) => (item.place = place));
    }
    const found = crossings(layers);
    if (found < fewest) {
      fewest = found;
      best = layers.map((layer) => [...layer]);
    }
  }
  best.forEach((layer, n) => (layers[n] = layer));
  number();
}

// Counts crossings between neighbouring layers: pairs of edges whose ends stand in another order than their beginnings.
export function crossings(layers) {
  let count = 0;
  for (const layer of layers.slice(0, -1)) {
    const size = Math.max(0, ...layer.flatMap((item) => item.behind.map((each) => each.place))) + 1;
    const tree = new Uint32Array(size + 1);
    let seen = 0;
    for (const item of [...layer].sort((one, other) => one.place - other.place)) {
      const places = item.behind.map((each) => each.place);
      for (const place of places) {
        let below = 0;
        for (let n = place + 1; n > 0; n -= n & -n) below += tree[n];
        count += seen - below;
      }
      for (const place of places) for (let n = place + 1; n <= size; n += n & -n) tree[n] += 1;
      seen += places.length;
    }
  }
  return count;
}

// Moves each item towards the middle of its neighbours, as far as the order and the distances allow.
function align({ layers }) {
  for (const layer of layers) settle(layer, layer.map(() => 0));
  for (let pass = 0; pass < 6; pass += 1) {
    const sides = pass % 2 === 0 ? [...layers.keys()] : [...layers.keys()].reverse();
    for (const n of sides) {
      const wanted = layers[n].map((item) => {
        const near = pass >= 4 ? [...item.before, ...item.behind] : pass % 2 === 0 ? item.before : item.behind;
        return near.length === 0 ? item.across : near.reduce((sum, each) => sum + each.across, 0) / near.length;
      });
      settle(layers[n], wanted);
    }
  }
}

// The nearest places to the wanted ones that keep the order and the distances: neighbours that would overlap share a block.
function settle(layer, wanted) {
  const blocks = [];
  let offset = 0;
  layer.forEach((item, n) => {
    if (n > 0) {
      const isEdge = item.id === null || layer[n - 1].id === null;
      offset += (layer[n - 1].size.across + item.size.across) / 2 + (isEdge ? EDGE_GAP : GAP);
    }
    item.offset = offset;
    let block = { sum: wanted[n] - offset, count: 1, first: n };
    while (blocks.length > 0 && blocks.at(-1).sum / blocks.at(-1).count >= block.sum / block.count) {
      const before = blocks.pop();
      block = { sum: before.sum + block.sum, count: before.count + block.count, first: before.first };
    }
    blocks.push(block);
  });
  for (const { sum, count, first } of blocks)
    for (let n = first; n < first + count; n += 1) layer[n].across = sum / count + layer[n].offset;
}

// Which layers stand in one row: each begins where few edges come from the row before.
function rowsOf({ layers }, most) {
  const sizes = layers.map((layer) => Math.max(0, ...layer.map((item) => item.size.along)));
  const whole = sizes.reduce((sum, size) => sum + size + LAYER_GAP, 0);
  if (whole <= most * MUCH_LONGER) return [[...layers.keys()]];
  const rows = [];
  let along = 0;
  sizes.forEach((size, n) => {
    const broken = n === 0 ? 0 : layers[n - 1].reduce((sum, item) => sum + item.behind.length, 0);
    if (n === 0 || (along + size > most && broken <= MOST_BROKEN)) {
      rows.push([]);
      along = 0;
    }
    rows.at(-1).push(n);
    along += size + LAYER_GAP;
  });
  return rows;
}

function drawn(level, { layers, links, at }, rows) {
  const spans = [];
  const shifts = [];
  const edge = rows.length > 1 ? ROW_END : 0;
  let [longest, below] = [0, 0];
  rows.forEach((row, number) => {
    const items = row.flatMap((n) => layers[n]);
    const top = Math.min(...items.map((item) => item.across - item.size.across / 2));
    const bottom = Math.max(...items.map((item) => item.across + item.size.across / 2));
    let along = edge;
    for (const n of row) {
      const size = Math.max(0, ...layers[n].map((item) => item.size.along));
      spans[n] = { begin: along, end: along + size, row: number, above: below - ROW_GAP / 2 };
      shifts[n] = below - top;
      along += size + LAYER_GAP;
    }
    longest = Math.max(longest, along - LAYER_GAP);
    below += bottom - top + ROW_GAP;
  });
  const across = (item) => item.across + shifts[item.layer];
  const boxes = level.map((node) => {
    const item = at.get(node.id);
    const box = { id: node.id, along: spans[item.layer].begin, across: across(item) - item.size.across / 2 };
    return { ...box, size: item.size };
  });
  const edges = links.map(({ from, to, path }) => ({ from, to, points: points(path, spans, across, longest + edge / 2) }));
  return { boxes, edges, along: longest + edge, across: below - ROW_GAP };
}

// The way of an edge: straight through each layer, and from the end of a row around to the begin of the next.
function points(path, spans, across, turn) {
  const found = [];
  path.forEach((item, n) => {
    const { begin, end, row, above } = spans[item.layer];
    if (n > 0) {
      const before = path[n - 1];
      if (spans[before.layer].row < row)
        found.push([turn, across(before)], [turn, above], [ROW_END / 2, above], [ROW_END / 2, across(item)]);
      found.push([begin, across(item)]);
    } else found.push([begin + item.size.along, across(item)]);
    if (n < path.length - 1 && (n > 0 || item.size.along < end - begin)) found.push([end, across(item)]);
  });
  return found;
}

function upright({ boxes, edges, along, across }, isDown) {
  const turn = (one, other) => (isDown ? [other, one] : [one, other]);
  const [width, height] = turn(along, across);
  return {
    width,
    height,
    boxes: boxes.map(({ id, along: a, across: c, size }) => {
      const [x, y] = turn(a, c);
      const [w, h] = turn(size.along, size.across);
      return { id, x, y, w, h };
    }),
    edges: edges.map(({ from, to, points }) => ({ from, to, points: points.map(([a, c]) => turn(a, c)) })),
  };
}

// Puts what is in a group to where the group stands.
function gather(members, inner) {
  const whole = inner.get(null) ?? { width: 0, height: 0, boxes: [], edges: [] };
  const boxes = new Map();
  const edges = [];
  const pending = [[null, 0, 0]];
  for (const [parent, left, top] of pending) {
    const found = inner.get(parent) ?? whole;
    for (const edge of found.edges) edges.push({ ...edge, points: edge.points.map(([x, y]) => [x + left, y + top]) });
    for (const box of found.boxes) {
      const placed = { ...box, x: box.x + left, y: box.y + top, depth: parent === null ? 0 : boxes.get(parent).depth + 1 };
      boxes.set(box.id, placed);
      if (!inner.has(box.id)) continue;
      const spare = box.w - 2 * PADDING - inner.get(box.id).width;
      pending.push([box.id, placed.x + PADDING + spare / 2, placed.y + HEADER]);
    }
  }
  return { boxes, edges, width: whole.width, height: whole.height };
}
