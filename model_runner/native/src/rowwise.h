// What is done to one row at a time. Included into an instruction set's namespace.

// e to the power of x within 2 units in the last place; 0 below -87.3, NaN for NaN. Cephes' expf (Moshier, 1989).
inline Vec exponential(Vec x) {
    const Vec low = all(-87.3f);
    const Vec clamped = max(low, min(all(88.3f), x));
    const Vec turns = round(mul(clamped, all(1.44269504f)));
    Vec rest = fma(turns, all(-0.693359375f), clamped);
    rest = fma(turns, all(2.12194440e-4f), rest);
    Vec poly = all(1.9875691500e-4f);
    poly = fma(poly, rest, all(1.3981999507e-3f));
    poly = fma(poly, rest, all(8.3334519073e-3f));
    poly = fma(poly, rest, all(4.1665795894e-2f));
    poly = fma(poly, rest, all(1.6666665459e-1f));
    poly = fma(poly, rest, all(5.0000001201e-1f));
    const Vec power = fma(poly, mul(rest, rest), add(rest, all(1.0f)));
    return zero_below(mul(power, power_of_two(turns)), x, low);
}

// Loads and stores the last `count` < kLanes numbers of a row; the other lanes are 0.
inline Vec load_part(const float* from, int64_t count) {
    float lanes[kLanes] = {};
    for (int64_t lane = 0; lane < count; ++lane) lanes[lane] = from[lane];
    return load(lanes);
}

inline void store_part(float* to, Vec value, int64_t count) {
    float lanes[kLanes];
    store(lanes, value);
    for (int64_t lane = 0; lane < count; ++lane) to[lane] = lanes[lane];
}

// Calls work(start, count) for each vector of a row; count is kLanes but for the last.
template <class Work>
inline void for_vectors(int64_t size, const Work& work) {
    int64_t start = 0;
    for (; start + kLanes <= size; start += kLanes) work(start, kLanes);
    if (start < size) work(start, size - start);
}

inline Vec load_up_to(const float* from, int64_t count) {
    return count == kLanes ? load(from) : load_part(from, count);
}

inline void store_up_to(float* to, Vec value, int64_t count) {
    if (count == kLanes) {
        store(to, value);
    } else {
        store_part(to, value, count);
    }
}

void rms_norm(const float* x, const float* weight, int64_t size, float epsilon, float* y) {
    Vec squares = all(0.0f);
    for_vectors(size, [&](int64_t start, int64_t count) {
        const Vec value = load_up_to(x + start, count);
        squares = fma(value, value, squares);
    });
    const Vec scale = all(1.0f / __builtin_sqrtf(sum(squares) / static_cast<float>(size) + epsilon));
    for_vectors(size, [&](int64_t start, int64_t count) {
        const Vec value = mul(load_up_to(x + start, count), scale);
        store_up_to(y + start, mul(value, load_up_to(weight + start, count)), count);
    });
}

void add_to(float* x, const float* y, int64_t size) {
    for_vectors(size, [&](int64_t start, int64_t count) {
        store_up_to(x + start, add(load_up_to(x + start, count), load_up_to(y + start, count)), count);
    });
}

void silu_multiply(const float* gate, const float* up, int64_t size, float* y) {
    for_vectors(size, [&](int64_t start, int64_t count) {
        const Vec g = load_up_to(gate + start, count);
        const Vec silu = div(g, add(all(1.0f), exponential(sub(all(0.0f), g))));
        store_up_to(y + start, mul(silu, load_up_to(up + start, count)), count);
    });
}

void rotate(float* head, const float* cos, const float* sin, int64_t half) {
    for_vectors(half, [&](int64_t start, int64_t count) {
        const Vec first = load_up_to(head + start, count), second = load_up_to(head + half + start, count);
        const Vec c = load_up_to(cos + start, count), s = load_up_to(sin + start, count);
        store_up_to(head + start, sub(mul(first, c), mul(second, s)), count);
        store_up_to(head + half + start, add(mul(second, c), mul(first, s)), count);
    });
}
