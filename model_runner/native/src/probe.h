// What the machine can do at most, for bench/kernels.py. Included into an instruction set's namespace.

// A sum over `turns` rounds of multiply-adds that never leave the registers: 2 * kLanes * kProbeChains each.
constexpr int kProbeChains = 12;

float multiply_add_probe(int64_t turns) {
    Vec acc[kProbeChains];
    for (Vec& each : acc) each = all(1.0f);
    const Vec x = all(0.999f), y = all(0.001f);
    for (int64_t turn = 0; turn < turns; ++turn) {
        OCTAVO_UNROLL
        for (int chain = 0; chain < 8; ++chain) acc[chain] = fma(acc[chain], x, y);
        OCTAVO_UNROLL
        for (int chain = 8; chain < kProbeChains; ++chain) acc[chain] = fma(acc[chain], x, y);
    }
    float total = 0;
    for (const Vec& each : acc) total += sum(each);
    return total;
}

// A sum over memory, which is all that it does with what it reads. size: a multiple of 4 vectors.
float read_probe(const float* from, int64_t size) {
    Vec acc[4] = {all(0.0f), all(0.0f), all(0.0f), all(0.0f)};
    for (int64_t start = 0; start < size; start += 4 * kLanes) {
        OCTAVO_UNROLL
        for (int vec = 0; vec < 4; ++vec) acc[vec] = add(acc[vec], load(from + start + vec * kLanes));
    }
    return sum(add(add(acc[0], acc[1]), add(acc[2], acc[3])));
}
