// Sums of products of bytes with AVX's older instructions, which keep pairs of products in 16 bits. Included into an
// instruction set's namespace.
//
// A number below 16 times one of 127 fits there eight times over; a larger one is taken apart into two halves.

// Two pairs of 8 * 15 * 127 each stay below 2^15.
struct NibbleSums {
    Bits pairs = all_ints(0);
    void add(Bits w, Bits x) { pairs = add_shorts(pairs, multiply_pairs(w, x)); }
    Bits total() const { return sum_pairs(pairs); }
};

// Sums of a group's products, four to a lane: w from 0 to 15 (nibbles) or to 255, x from -127 to 127.
template <bool nibbles>
struct Sums {
    NibbleSums low;
    void start(int32_t) {}
    void add(Bits w, Bits x) { low.add(w, x); }
    Bits total() const { return low.total(); }
};

template <>
struct Sums<false> {
    NibbleSums low, high;
    int32_t first;
    void start(int32_t value) { first = value; }
    void add(Bits w, Bits x) {
        low.add(low_nibbles(w), x);
        high.add(high_nibbles(w), x);
    }
    Bits total() const {
        return add_ints(all_ints(first), add_ints(low.total(), shift_ints<4>(high.total())));
    }
};
