// Orders of rows as numpy draws them: a Philox4x64-10 stream (Salmon et al. 2011), and swaps from the last place to the
// first, each with a place drawn from those up to it: as many bits as its number has, again until they are not more.

class Philox {
  public:
    static constexpr int BLOCKS = 4, AT_ONCE = 8 * BLOCKS;  // so many blocks keep a processor busy

    explicit Philox(const uint64_t* key) : key{key[0], key[1]} {}

    // The next numbers of 32 bits: of four numbers of 64 bits in a block, each its lower half first, as in memory.
    void draw(uint32_t (&numbers)[AT_ONCE]) {
        uint64_t a[BLOCKS], b[BLOCKS] = {}, c[BLOCKS] = {}, d[BLOCKS] = {}, k = key[0], l = key[1];
        for (int n = 0; n < BLOCKS; n++) a[n] = ++counter;  // never so many that its upper three numbers count
        for (int round = 0; round < 10; round++, k += 0x9E3779B97F4A7C15, l += 0xBB67AE8584CAA73B)
            for (int n = 0; n < BLOCKS; n++) {
                const unsigned __int128 left = (unsigned __int128)0xD2E7470EE14C6C93 * a[n];
                const unsigned __int128 right = (unsigned __int128)0xCA5A826395121157 * c[n];
                a[n] = (uint64_t)(right >> 64) ^ b[n] ^ k, b[n] = right;
                c[n] = (uint64_t)(left >> 64) ^ d[n] ^ l, d[n] = left;
            }
        for (int n = 0; n < BLOCKS; n++) {
            const uint64_t block[4] = {a[n], b[n], c[n], d[n]};
            std::memcpy(numbers + 8 * n, block, sizeof block);
        }
    }

  private:
    const uint64_t key[2];
    uint64_t counter = 0;
};

// An order of 0 … size − 1, where `places` has room for as many. Only its last `wanted` places are drawn, the
// others are left unfinished.
inline void shuffle(int32_t* order, uint32_t* places, long size, long wanted, Philox random) {
    uint32_t numbers[Philox::AT_ONCE], mask = ~0u;
    const long left = std::max(size - 1 - wanted, 0L);
    for (long last = size - 1; last > left;) {
        random.draw(numbers);
        for (int n = 0; n < Philox::AT_ONCE && last > left; n++) {
            while (mask / 2 >= last) mask /= 2;
            const uint32_t drawn = numbers[n] & mask;
            places[last] = drawn;
            last -= drawn <= last;  // without a branch, which no processor could predict
        }
    }
    std::iota(order, order + size, 0);
    for (long last = size - 1; last > left; last--) std::swap(order[last], order[places[last]]);
}

// Epochs are a number of rows, and how many of the last in their order are wanted: these, one epoch after the other.
inline void shuffle_ends(int32_t* ends, const uint64_t* keys, const int64_t* epochs, long count) {
    long longest = 0;
    for (long e = 0; e < count; e++) longest = std::max(longest, (long)epochs[2 * e]);
    std::vector<int32_t> order(longest);
    std::vector<uint32_t> places(longest);
    for (long e = 0; e < count; e++) {
        const long size = epochs[2 * e], wanted = epochs[2 * e + 1];
        if (!wanted) continue;
        shuffle(order.data(), places.data(), size, wanted, Philox(keys + 2 * e));
        ends = std::copy(order.begin() + size - wanted, order.begin() + size, ends);
    }
}

// Epochs are slot, first step and number of rows; an epoch's rows, which all stand at their client's first, become that
// many places after it, in the order drawn with its key. Threads take epochs as they come to them.
inline void shuffle_epochs(
    int32_t* rows, const uint64_t* keys, const int64_t* epochs, long count, long slots, long width, int threads) {
    long longest = 0;
    for (long e = 0; e < count; e++) longest = std::max(longest, (long)epochs[3 * e + 2]);
    std::vector<int32_t> orders(threads * longest);
    std::vector<uint32_t> places(threads * longest);
    std::atomic<long> next{0};
    const auto work = [&](int thread) {
        int32_t* order = orders.data() + thread * longest;
        for (long e = next++; e < count; e = next++) {
            const long slot = epochs[3 * e], first = epochs[3 * e + 1], size = epochs[3 * e + 2];
            shuffle(order, places.data() + thread * longest, size, size, Philox(keys + 2 * e));
            int32_t* row = rows + (first * slots + slot) * width;
            for (long begin = 0; begin < size; begin += width, row += slots * width) {
                const long end = std::min(begin + width, size);
                for (long i = begin; i < end; i++) row[i - begin] += order[i];
            }
        }
    };
    std::vector<std::thread> others;
    others.reserve(threads);
    try {
        for (int t = 1; t < threads; t++) others.emplace_back(work, t);
    } catch (...) {  // no further thread or no memory for one: those that have started do the work
    }
    work(0);
    for (std::thread& other : others) other.join();
}
