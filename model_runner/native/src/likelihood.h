// How likely tokens are, in whole numbers. Included into an instruction set's namespace.
//
// Only single sums, differences and products in double: their bits are the same in every instruction set, and those of
// model_runner/sampling_weights.py, which says what the numbers mean.

// What is added to this becomes a whole number in the lowest bits, the even one of two.
constexpr double kWholeNumbers = 0x1.8p52;

inline int64_t bits_of_double(double value) {
    int64_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

inline double double_of_bits(int64_t bits) {
    double value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline int64_t whole_number(double shifted) { return bits_of_double(shifted) - bits_of_double(kWholeNumbers); }

// The logarithm to base 2 of how much less likely than the likeliest token; NaN counts as the least.
inline double power_of(float logit, const Weighing& by) {
    const double power = (static_cast<double>(logit) - by.most) * by.scale;
    return power > kLeastPower ? power : kLeastPower;
}

int64_t weigh(const float* logits, int64_t size, const Weighing& by, int64_t* weights) {
    int64_t sum = 0;
    for (int64_t token = 0; token < size; ++token) {
        const double power = power_of(logits[token], by);
        const double shifted = power + kWholeNumbers;
        const double rest = power - (shifted - kWholeNumbers);
        double value = kPowerSeries[0];
        for (int term = 1; term < kPowerTerms; ++term) value = value * rest + kPowerSeries[term];
        const double unit = double_of_bits((whole_number(shifted) + kWeightBits + 1023) << 52);
        weights[token] = whole_number(value * unit + kWholeNumbers);
        sum += weights[token];
    }
    return sum;
}

int64_t keep(const float* logits, int64_t size, float least_logit, int64_t least_weight, int64_t* weights) {
    int64_t sum = 0;
    for (int64_t token = 0; token < size; ++token) {
        const int64_t weight = logits[token] >= least_logit ? weights[token] : 0;
        weights[token] = weight >= least_weight ? weight : 0;
        sum += weights[token];
    }
    return sum;
}

void buckets_of(const float* logits, int64_t size, const Weighing& by, int32_t* buckets) {
    for (int64_t token = 0; token < size; ++token) {
        const double place = power_of(logits[token], by) * -kBucketsPerPower;
        buckets[token] = static_cast<int32_t>(place < kBuckets - 1 ? place : kBuckets - 1);
    }
}

float largest_of(const float* values, int64_t size) {
    Vec most = all(-__builtin_inff());
    int64_t start = 0;
    for (; start + kLanes <= size; start += kLanes) most = max(load(values + start), most);
    float result = largest(most);
    for (; start < size; ++start) result = values[start] > result ? values[start] : result;
    return result;
}
